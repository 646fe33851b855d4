"""Capturing: what runs. Attention that any torch model computes is intercepted and handed on as an `ObservedCall`."""
