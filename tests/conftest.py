import os

# The models here are tiny: a second thread would only spin, and fight with the servers that the tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
