"""The commands that a user types. The function `command` of a module runs the command of its name."""
