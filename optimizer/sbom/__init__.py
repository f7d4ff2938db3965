"""``optimize sbom``: a bundle's bill of materials, in CycloneDX."""

from __future__ import annotations

from .bill import bill_of_materials, moment, write_bill
from .source_facts import SourceFacts, source_facts

__all__ = ["SourceFacts", "bill_of_materials", "moment", "source_facts", "write_bill"]
