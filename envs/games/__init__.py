"""One file per grid game. Every module in this folder is imported, and its GridGame classes become available."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
