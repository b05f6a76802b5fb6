"""Request traces: the columnar record every reader produces, the readers, and small samples."""
