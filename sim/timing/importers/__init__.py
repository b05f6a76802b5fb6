"""Timing tables from other people's measurements: one file a source."""
