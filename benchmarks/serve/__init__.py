"""The parts of ``benchmarks/serving.py`` and of ``tests/e2e_gpu``: checkpoints, servers, a client, profiles, reports."""
