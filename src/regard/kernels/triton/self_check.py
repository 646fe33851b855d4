"""Self-check."""
def trusted(device): return False
def doubt(device): return "x"
