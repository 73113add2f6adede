"""KV blocks in files: a folder for each model and format, one owner at a time, a checksum for each block."""
