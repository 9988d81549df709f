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

/// Changes of a region's state at a gateway; `None` from the time at which the gateway stopped responding.
type RegionChanges = Vec<(Duration, Option<RegionObservation>)>;

/// Observations in order of time; only changes are kept.
#[derive(Clone, Debug, Default)]
pub struct DrillObservations {
    /// By region, and name of the gateway.
    regions: BTreeMap<RegionId, BTreeMap<String, RegionChanges>>,
    tables: BTreeMap<String, Vec<(Duration, TableObservation)>>,
}

impl DrillObservations {
    /// Records the state of a region at a gateway; returns whether it differs from the last one that the gateway reported.
    pub fn region(
        &mut self,
        at: Duration,
        gateway: &str,
        region: &RegionId,
        observation: RegionObservation,
    ) -> bool {
        let gateways = self.regions.entry(region.clone()).or_default();
        let changes = gateways.entry(gateway.to_owned()).or_default();
        let reported = changes.iter().rev().find_map(|(_, reported)| reported.as_ref());
        let differs = reported.is_some_and(|reported| *reported != observation);
        push_change(changes, at, Some(observation));
        differs
    }

    /// Records that a gateway stopped responding: it was killed, stopped or paused, and uses no region. Returns whether it
    /// responded before.
    pub fn unreachable(&mut self, at: Duration, gateway: &str) -> bool {
        let mut responded = false;
        for changes in self.regions.values_mut().filter_map(|gateways| gateways.get_mut(gateway)) {
            responded |= push_change(changes, at, None);
        }
        responded
    }

    /// Returns whether a gateway has stopped responding, and reported no region since.
    pub fn is_unreachable(&self, gateway: &str) -> bool {
        let regions = self.regions.values().filter_map(|gateways| gateways.get(gateway));
        let mut last = regions.filter_map(|changes| changes.last()).peekable();
        last.peek().is_some() && last.all(|(_, reported)| reported.is_none())
    }

    /// Returns the gateways that did not respond at a time, of those that reported a region before.
    pub fn unreachable_at(&self, region: &RegionId, at: Duration) -> Vec<&str> {
        let gateways = self.regions.get(region).into_iter().flatten();
        let unreachable = gateways.filter(|(_, changes)| matches!(latest(changes, at), Some(None)));
        unreachable.map(|(gateway, _)| gateway.as_str()).collect()
    }

    /// Records the table of a reader; returns whether it changed.
    pub fn table(&mut self, at: Duration, reader: &str, table: TableObservation) -> bool {
        push_change(self.tables.entry(reader.to_owned()).or_default(), at, table)
    }

    /// Returns the last state of a region at a time, by gateway; without gateways that did not respond at that time.
    pub fn region_at(&self, region: &RegionId, at: Duration) -> BTreeMap<&str, &RegionObservation> {
        let gateways = self.regions.get(region).into_iter().flatten();
        let reported = gateways
            .filter_map(|(gateway, changes)| Some((gateway.as_str(), latest(changes, at)?.as_ref()?)));
        reported.collect()
    }

    /// Returns the states that a region entered at any gateway within a span.
    pub fn region_within(&self, region: &RegionId, from: Duration, to: Duration) -> Vec<&RegionObservation> {
        let changes = self.regions.get(region).into_iter().flat_map(BTreeMap::values).flatten();
        let within = changes.filter(|(at, _)| (from..to).contains(at));
        within.filter_map(|(_, observation)| observation.as_ref()).collect()
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
