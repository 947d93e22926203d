"""Checks proposals in sweeps over the target model's layers."""
