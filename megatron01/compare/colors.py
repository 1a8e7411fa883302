"""Colours that most kinds of colour blindness leave apart, on light and on dark ground."""

LIGHT_GROUND, DARK_GROUND = "#ffffff", "#15181c"
LIGHT = ("#0067a5", "#c24e00", "#007f5f", "#a8327e", "#6b5fc7", "#857000", "#2b2b2b", "#1b8ea6")
DARK = ("#5cb3f0", "#ff9a4d", "#37cfa4", "#f08fc8", "#b3a8ff", "#e3cf57", "#e6e6e6", "#6fdcec")
"""After Okabe and Ito, darkened or lightened until lines stand out from the ground (3:1, as WCAG asks of graphics)."""
