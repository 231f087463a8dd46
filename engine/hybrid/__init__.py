"""Generation inside training: the same weights in a tensor-parallel inference layout, and a decoder for it."""

from engine.hybrid.engine import HybridEngine
from engine.hybrid.generator import Generator
from engine.hybrid.requests import GenerateOutput

__all__ = ["GenerateOutput", "Generator", "HybridEngine"]
