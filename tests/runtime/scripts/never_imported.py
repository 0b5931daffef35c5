"""Its import takes an hour."""

import time

time.sleep(3600)
