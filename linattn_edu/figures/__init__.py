"""Figures that are gone through: each module's figure() makes frames of SVG text from real numbers.

It returns what linattn_edu.steps.steps_html takes: the frames with their captions, a label for
the slider and, where there is something to choose, the choices.
"""
