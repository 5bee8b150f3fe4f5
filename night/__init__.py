"""Many experiments: `python -m night run / wave / report / plot`; see `__main__.py`."""
