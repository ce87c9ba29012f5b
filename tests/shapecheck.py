"""The checker of signatures under test: beartype.

A whole number may stand for a float (PEP 484).
"""

from beartype import BeartypeConf, beartype

typed = beartype(conf=BeartypeConf(is_pep484_tower=True))
