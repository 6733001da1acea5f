"""The live screen. It shows a document and computes nothing; Textual is used only here."""
