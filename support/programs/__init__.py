"""What the programs share, built on lococo.py: settings, the adapter, flags, reports, the
page."""
