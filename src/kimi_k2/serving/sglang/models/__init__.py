"""What `SGLANG_EXTERNAL_MODEL_PACKAGE` names: SGLang takes the `EntryClass` of each module here."""
