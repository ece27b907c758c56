"""What several methods share: base classes and functions of plug-ins. No plug-in is here, and none is named here."""
