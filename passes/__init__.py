"""Program -> Program: one pass a file, the file named after its verb phrase."""
