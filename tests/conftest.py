"""What every test runs under: one torch thread a process, and no network."""

import os

# Before transformers is imported, which reads them once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
