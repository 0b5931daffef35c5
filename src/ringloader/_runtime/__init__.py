"""The shell: facts of the operating system become events, commands become system calls."""
