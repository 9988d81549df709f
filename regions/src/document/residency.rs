//! Reader of a residency policy in a table of a file: `residency = { allow = ["eu"] }`.

use std::ops::Range;

use super::{Problems, Table};
use crate::catalogue::Catalogue;
use crate::residency::{Area, ResidencyPolicy};

/// Reads the residency policy of a table, of at most `len_max` bytes; [`ResidencyPolicy::Anywhere`] if the key is absent.
pub(crate) fn read(
    table: &Table<'_>,
    len_max: usize,
    catalogue: &Catalogue,
    problems: &mut Problems<'_>,
) -> Option<ResidencyPolicy> {
    let Some(value) = table.entries.get("residency") else {
        return Some(ResidencyPolicy::Anywhere);
    };
    let residency = Table::of(format!("{}: `residency`", table.what), value, problems)?;
    residency.refuse_other_keys(&["allow"], problems);
    let allow = residency.need("allow", "[\"eu\"]", problems)?;
    let list = residency.texts("allow", allow, problems)?;
    let given = list.len();
    let check = |(text, at): (&str, Range<usize>)| -> Option<Area> {
        let area = text.parse::<Area>().map_err(|error| error.to_string());
        area.and_then(|area| area.check(catalogue).map(|()| area))
            .map_err(|problem| problems.note(at, format!("{}: {problem}", residency.what)))
            .ok()
    };
    let areas: Vec<Area> = list.into_iter().filter_map(check).collect();
    if given == 0 {
        let message =
            "`allow` is empty and permits nothing: name areas, or remove `residency` to permit all regions";
        problems.note(allow.span(), format!("{}: {message}", residency.what));
    }
    let policy = ResidencyPolicy::any_of(areas).ok()?;
    let len = policy.to_string().len();
    if len > len_max {
        let message =
            format!("`allow` has {len} bytes, of {len_max} that fit: name jurisdictions instead of regions");
        problems.note(allow.span(), format!("{}: {message}", residency.what));
        return None;
    }
    Some(policy)
}
