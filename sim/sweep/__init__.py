"""Many configurations from one file, run once each, in parallel, resumable.

`spec` reads the file, `cells` makes a checked configuration of every combination, `work` runs one,
`local` and `ray_cluster` run many, `folder` keeps what is finished.
"""
