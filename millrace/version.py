"""The version: its one owner. Apart from the package, so that no module imports the package to learn it."""

__version__ = "0.1.0"
