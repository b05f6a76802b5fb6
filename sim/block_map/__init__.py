"""The report page: one HTML file with summary, charts and an animated map of the KV pool."""
