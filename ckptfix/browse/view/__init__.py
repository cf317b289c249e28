"""The screens, drawn with Textual; nothing else imports it."""
