"""The engine's tests run where vLLM is installed, in an environment of their own."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
