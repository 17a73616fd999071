"""How the kernel that looks behind documents cuts its rows."""

#: Rows that one program looks at, elements of a row at once, and warps.
ROWS = 8
COLUMNS = 256
WARPS = 4
