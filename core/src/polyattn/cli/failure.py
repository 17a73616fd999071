"""The user's own error: wrong arguments, an unreadable file, a package that is missing. One line, exit code 2."""


class UsageError(Exception):
    """Its text is the line that the user reads."""
