"""Capturing: attention that any torch model computes is intercepted and passed on as an `ObservedCall`."""
