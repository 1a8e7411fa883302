"""Colours that the common kinds of colour blindness leave apart, on light and on dark ground."""

LIGHT_GROUND, DARK_GROUND = "#ffffff", "#15181c"
LIGHT = ("#0067a5", "#e1690f", "#4b2d1e", "#962dff", "#b47878", "#3c0096", "#873c00", "#ff1ee1")
DARK = ("#5cb3f0", "#ff871e", "#ffe1c3", "#b4f078", "#b42dff", "#b4875a", "#787878", "#b4b4c3")
"""As far from each other as possible (in CIELAB), with normal sight and with each kind of dichromacy as
simulated by Machado et al. 2009; lines stand out from the ground by 3:1, as WCAG 2 asks of graphics."""
