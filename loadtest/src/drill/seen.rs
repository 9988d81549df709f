//! What whoever runs a drill has seen of the world beside the answers: how the gateway sees regions, and which tables there are.

use std::collections::BTreeMap;
use std::time::Duration;

use regions::{Generation, RegionId};

/// How a gateway sees a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sight {
    /// `healthy`, `suspect` or `down`, as the gateway says.
    pub health: String,
    /// Whether an operator wants it emptied.
    pub draining: bool,
}

/// A table that a reader has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table {
    /// Its number.
    pub generation: Generation,
    /// What stands in it, as a number that is another one for another content; none where a reader tells the number only.
    pub content: Option<u64>,
}

/// What was seen, by moment; only what differs from what was seen last.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    regions: BTreeMap<RegionId, Vec<(Duration, Sight)>>,
    tables: BTreeMap<String, Vec<(Duration, Table)>>,
}

impl Seen {
    /// Notes how a gateway sees a region; whether that is news.
    pub fn region(&mut self, at: Duration, region: &RegionId, sight: Sight) -> bool {
        note(self.regions.entry(region.clone()).or_default(), at, sight)
    }

    /// Notes which table a reader has; whether that is news.
    pub fn table(&mut self, at: Duration, reader: &str, table: Table) -> bool {
        note(self.tables.entry(reader.to_owned()).or_default(), at, table)
    }

    /// How a region was last seen at a moment.
    pub fn region_at(&self, region: &RegionId, at: Duration) -> Option<&Sight> {
        last(self.regions.get(region)?, at)
    }

    /// How it was seen anew within a span, in order.
    pub fn region_within(&self, region: &RegionId, from: Duration, to: Duration) -> Vec<&Sight> {
        let seen = self.regions.get(region).into_iter().flatten();
        seen.filter(|(at, _)| (from..to).contains(at)).map(|(_, sight)| sight).collect()
    }

    /// The table of each reader at a moment.
    pub fn tables_at(&self, at: Duration) -> BTreeMap<&str, Table> {
        let readers = self.tables.iter();
        readers.filter_map(|(reader, tables)| Some((reader.as_str(), *last(tables, at)?))).collect()
    }

    /// All tables of each reader, in order.
    pub fn tables(&self) -> impl Iterator<Item = (&str, &[(Duration, Table)])> {
        self.tables.iter().map(|(reader, tables)| (reader.as_str(), tables.as_slice()))
    }
}

fn note<T: PartialEq>(seen: &mut Vec<(Duration, T)>, at: Duration, what: T) -> bool {
    let news = seen.last().is_none_or(|(_, before)| *before != what);
    if news {
        seen.push((at, what));
    }
    news
}

fn last<T>(seen: &[(Duration, T)], at: Duration) -> Option<&T> {
    seen.iter().take_while(|(moment, _)| *moment <= at).last().map(|(_, what)| what)
}
