"""Small programs as users write them outside of layers: graphs, audio, vision, text, learning and science."""

from benchmarks.cases.tasks import audio, graphs, learning, science, text, vision

CASES = (*graphs.CASES, *audio.CASES, *vision.CASES, *text.CASES, *learning.CASES, *science.CASES)
