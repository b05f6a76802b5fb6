"""What ``kvsim`` does, a file a command. Results go to stdout and files, all else to stderr."""
