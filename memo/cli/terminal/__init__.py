"""What every command needs of files and terminals: output files, kinds of input files, a line while it works."""
