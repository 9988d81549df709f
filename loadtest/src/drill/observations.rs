//! Observations during a drill besides the responses: region health at each gateway, and route tables at each reader.

use std::collections::BTreeMap;
use std::time::Duration;

use regions::{Generation, RegionId};

/// State of a region as a gateway reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionObservation {
    /// `healthy`, `suspect` or `down`.
    pub health: String,
    /// Whether an operator drains the region.
    pub draining: bool,
}

/// Route table that a reader has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableObservation {
    /// Generation of the table.
    pub generation: Generation,
    /// Digest of the content; `None` if the reader reports only the generation.
    pub content: Option<u64>,
}

/// Observations in order of time; only changes are kept.
#[derive(Clone, Debug, Default)]
pub struct DrillObservations {
    /// By region, and name of the gateway.
    regions: BTreeMap<RegionId, BTreeMap<String, Vec<(Duration, RegionObservation)>>>,
    tables: BTreeMap<String, Vec<(Duration, TableObservation)>>,
}

impl DrillObservations {
    /// Records the state of a region at a gateway; returns whether it changed.
    pub fn region(
        &mut self,
        at: Duration,
        gateway: &str,
        region: &RegionId,
        observation: RegionObservation,
    ) -> bool {
        let gateways = self.regions.entry(region.clone()).or_default();
        push_change(gateways.entry(gateway.to_owned()).or_default(), at, observation)
    }

    /// Records the table of a reader; returns whether it changed.
    pub fn table(&mut self, at: Duration, reader: &str, table: TableObservation) -> bool {
        push_change(self.tables.entry(reader.to_owned()).or_default(), at, table)
    }

    /// Returns the last state of a region at a time, by gateway.
    pub fn region_at(&self, region: &RegionId, at: Duration) -> BTreeMap<&str, &RegionObservation> {
        let gateways = self.regions.get(region).into_iter().flatten();
        gateways.filter_map(|(gateway, changes)| Some((gateway.as_str(), latest(changes, at)?))).collect()
    }

    /// Returns the states that a region entered at any gateway within a span.
    pub fn region_within(&self, region: &RegionId, from: Duration, to: Duration) -> Vec<&RegionObservation> {
        let changes = self.regions.get(region).into_iter().flat_map(BTreeMap::values).flatten();
        changes.filter(|(at, _)| (from..to).contains(at)).map(|(_, observation)| observation).collect()
    }

    /// Returns the table of each reader at a time.
    pub fn tables_at(&self, at: Duration) -> BTreeMap<&str, TableObservation> {
        let readers = self.tables.iter();
        readers.filter_map(|(reader, tables)| Some((reader.as_str(), *latest(tables, at)?))).collect()
    }

    /// Returns all tables of each reader, in order.
    pub fn tables(&self) -> impl Iterator<Item = (&str, &[(Duration, TableObservation)])> {
        self.tables.iter().map(|(reader, tables)| (reader.as_str(), tables.as_slice()))
    }
}

fn push_change<T: PartialEq>(changes: &mut Vec<(Duration, T)>, at: Duration, value: T) -> bool {
    let changed = changes.last().is_none_or(|(_, before)| *before != value);
    if changed {
        changes.push((at, value));
    }
    changed
}

fn latest<T>(changes: &[(Duration, T)], at: Duration) -> Option<&T> {
    changes.iter().take_while(|(moment, _)| *moment <= at).last().map(|(_, value)| value)
}
