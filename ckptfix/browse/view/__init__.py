"""The screens, drawn with Textual; no other package imports Textual."""
