"""Lowers a Program to a lowered program: a list of steps over strided operands, which several targets run or
compile.
"""
