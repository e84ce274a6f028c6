"""Packages of the distribution: every folder of torch_hybrid, and those of ops and graphs in it."""

from setuptools import find_packages, setup

inner = find_packages(include=["ops*", "graphs*"])
setup(
    packages=[
        *find_packages(include=["torch_hybrid*"]),
        *(f"torch_hybrid.{package}" for package in inner),
    ]
)
