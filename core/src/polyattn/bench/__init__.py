"""Measuring backends on the machine at hand: interleaved times of named shapes, and the order that they give."""
