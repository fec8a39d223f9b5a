"""Mechanisms that the training loops call: which samples, where, saved how, stopped when. Nothing here trains."""
