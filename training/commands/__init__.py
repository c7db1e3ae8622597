"""The commands that a user types. Each module has the function `command` of the command of its name."""
