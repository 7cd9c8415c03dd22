"""The parts of ``benchmarks/serving.py`` and ``tests/e2e_gpu``: checkpoints, servers, a client, profiles, reports."""
