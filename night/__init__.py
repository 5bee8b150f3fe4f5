"""Many experiments: `python -m night --help`, or see `__main__.py`."""
