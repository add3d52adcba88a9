"""The package's version, for modules that cannot import the package's root."""

__version__ = "0.6.0"
