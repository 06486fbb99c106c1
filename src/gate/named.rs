//! The rows that there are, by name: what a ledger row may call its mechanism's rows.

use std::collections::BTreeSet;
use std::path::Path;

use walkdir::WalkDir;

use crate::timing::InputError;

use super::analysis::{Finding, Kind, found};
use super::base::Base;
use super::ledger::LedgerRow;
use super::pattern::matches;

/// Host rows (`host/ID`), op tables (`b200_sxm/moe/sglang/0.5.14/moe_perf`) and rooflines
/// (`b200_sxm/mem_bw`), of this folder and of a base: a change may take a row away.
#[derive(Debug, Default)]
pub struct RowNames(BTreeSet<String>);

impl RowNames {
    /// # Errors
    /// No repository or no such revision.
    pub fn read(root: &Path, rev: &str) -> Result<Self, InputError> {
        Self::of(root, &Base::open(root, rev)?)
    }

    pub(super) fn of(root: &Path, base: &Base) -> Result<Self, InputError> {
        let mut names = Self::default();
        for file in base.under("data", "") {
            if let Some(text) = names.add(file).then(|| base.bytes(file)).transpose()? {
                names.add_host_rows(&text.unwrap_or_default());
            }
        }
        for entry in WalkDir::new(root.join("data")).into_iter().flatten() {
            let inner = entry.path().strip_prefix(root).unwrap_or(entry.path());
            if names.add(&inner.to_string_lossy().replace('\\', "/")) {
                names.add_host_rows(&std::fs::read(entry.path()).unwrap_or_default());
            }
        }
        Ok(names)
    }

    /// Adds what a file's path alone names. Returns whether it is a file of host rows.
    fn add(&mut self, file: &str) -> bool {
        let table = file.strip_prefix("data/systems/data/");
        if let Some(label) = table.and_then(|inner| inner.strip_suffix(".parquet")) {
            self.0.insert(label.to_owned());
        }
        let bare = |folder: &str| {
            let name = file.strip_prefix(folder)?.strip_suffix(".yaml")?;
            (!name.contains('/')).then_some(name)
        };
        if let Some(system) = bare("data/systems/") {
            self.0.insert(format!("{system}/mem_bw"));
        }
        bare("data/host/").is_some()
    }

    fn add_host_rows(&mut self, text: &[u8]) {
        for line in String::from_utf8_lossy(text).lines() {
            let line = line.trim_start().trim_start_matches("- ");
            if let Some(id) = line.strip_prefix("id:") {
                let id = id.trim().trim_matches(['"', '\'']);
                self.0.insert(format!("host/{id}"));
            }
        }
    }

    /// Whether there is such a row: by its whole name, that of its table, or a pattern with `*`
    /// behind its beginning.
    pub fn has(&self, row: &str) -> bool {
        let table = match row.split_once('#') {
            Some((table, number)) if number.parse::<u32>().is_ok_and(|number| number > 0) => table,
            _ => row,
        };
        !table.starts_with('*') && self.0.iter().any(|name| matches(table, name))
    }

    /// New ledger rows whose mechanism rests on rows that there are not.
    pub(super) fn findings(&self, rows: &[&LedgerRow]) -> Vec<Finding> {
        let named = rows.iter().flat_map(|row| &row.rows);
        let unknown: BTreeSet<&String> = named.filter(|row| !self.has(row)).collect();
        let of = |row: &String| {
            let what =
                format!("new ledger rows name `{row}`: no row is called so, here or in the base");
            found(Kind::Unrecorded, what)
        };
        unknown.into_iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_the_names_that_explanations_give() {
        let mut names = RowNames::default();
        assert!(!names.add("data/systems/data/b200_sxm/moe/sglang/0.5.14/moe_perf.parquet"));
        assert!(!names.add("data/systems/b200_sxm.yaml"));
        assert!(names.add("data/host/a.yaml"));
        assert!(!names.add("data/host/sources/a.csv"));
        names.add_host_rows(
            b"rows:\n  - id: ingress-1\n    id_of: x\n  - boundary: x\n    id: \"b\"\n",
        );
        for row in [
            "host/ingress-1",
            "host/b",
            "host/*",
            "b200_sxm/mem_bw",
            "b200_sxm/*",
            "b200_sxm/moe/sglang/0.5.14/moe_perf",
            "b200_sxm/moe/sglang/0.5.14/moe_perf#368",
        ] {
            assert!(names.has(row), "{row}");
        }
        for row in [
            "",
            "*",
            "*x",
            "host/ingress",
            "host/x",
            "b200_sxm/moe/sglang/0.5.14/moe_perf#0",
            "b200_sxm/moe/sglang/0.5.14/moe_perf#x",
            "h100_sxm/*",
        ] {
            assert!(!names.has(row), "{row}");
        }
    }
}
