"""What people do around a training step: the list is in `table.py`."""
