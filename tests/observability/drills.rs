//! Alerts of the shipped drills: which fire in the replay of each recording, and when.

use crate::recording::{self, Recording, metrics_of_rules};
use crate::replay::Replay;
use crate::{has_promtool, read, root};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Page with the table of the alerts, and the lines around it.
const PAGE: &str = "docs/drills.md";
const MARKS: [&str; 2] = [
    "<!-- alerts: rendered by the test, MERIDIAN_WRITE_DOCS=1 cargo test --profile quick --test observability -->\n",
    "<!-- end of alerts -->",
];
/// Maximum bytes of a recording.
const BYTES_MAX: u64 = 64 << 10;

/// Shipped drill, and the alerts that it raises; no other may fire.
struct ExpectedDrill {
    name: &'static str,
    /// Seconds of the repairs before which the fault is held.
    held: &'static [usize],
    /// Alerts, with the seconds from the first action at which each may fire first.
    alerts: &'static [(&'static str, Range<i64>)],
}

/// Alerts that fired in a replay, with their seconds from the first action.
type Fired = BTreeMap<String, i64>;

/// An alert about the fleet of a drill rather than its fault: no other region can serve its requests.
const BEFORE: Range<i64> = -3600..0;
/// Seconds after which an alert with a `for` of two, five or ten minutes must have fired: the detection by gateways and hubs, a scrape,
/// and an evaluation.
const AFTER_TWO_MINUTES: Range<i64> = 120..180;
const AFTER_FIVE_MINUTES: Range<i64> = 300..360;
const AFTER_TEN_MINUTES: Range<i64> = 600..660;
/// The budget of an hour has to be used up first: that of a deployment whose requests all fail, and that of the fleet.
const BURN_OF_DEPLOYMENT: Range<i64> = 180..360;
const BURN_OF_FLEET: Range<i64> = 240..480;

const DRILLS: [ExpectedDrill; 11] = [
    ExpectedDrill { name: "flapping-region", held: &[], alerts: &[] },
    ExpectedDrill {
        name: "grey-region",
        held: &[26],
        alerts: &[("MeridianRegionEjected", AFTER_TEN_MINUTES)],
    },
    ExpectedDrill {
        name: "hub-loss",
        held: &[22],
        alerts: &[("MeridianNoLeader", AFTER_TWO_MINUTES), ("MeridianTargetDown", AFTER_FIVE_MINUTES)],
    },
    // The scrape of a paused process ends after it continues, so the second before the last is held.
    ExpectedDrill {
        name: "hub-takeover",
        held: &[29],
        alerts: &[("MeridianTargetDown", AFTER_FIVE_MINUTES)],
    },
    ExpectedDrill {
        name: "region-kill",
        held: &[],
        alerts: &[
            ("MeridianCapacityNotRedundant", BEFORE),
            ("MeridianRegionDown", AFTER_TWO_MINUTES),
            ("MeridianTargetDown", AFTER_FIVE_MINUTES),
        ],
    },
    ExpectedDrill {
        name: "residency-under-outage",
        held: &[18],
        alerts: &[
            ("MeridianCapacityNotRedundant", BEFORE),
            ("MeridianNoCapacityInAllowedRegions", AFTER_TWO_MINUTES),
            ("MeridianRegionDown", AFTER_TWO_MINUTES),
            ("MeridianTargetDown", AFTER_FIVE_MINUTES),
            ("MeridianDeploymentAvailabilityBudgetBurn", BURN_OF_DEPLOYMENT),
            ("MeridianAvailabilityBudgetBurn", BURN_OF_FLEET),
        ],
    },
    ExpectedDrill { name: "rolling-restart", held: &[], alerts: &[] },
    ExpectedDrill {
        name: "rolling-upgrade",
        held: &[20, 34],
        alerts: &[("MeridianCapacityNotRedundant", BEFORE), ("MeridianTargetDown", AFTER_FIVE_MINUTES)],
    },
    ExpectedDrill {
        name: "silent-partition",
        held: &[22],
        alerts: &[("MeridianRegionDown", AFTER_TWO_MINUTES)],
    },
    ExpectedDrill {
        name: "store-loss",
        held: &[22],
        alerts: &[("MeridianStoreUnreachable", AFTER_FIVE_MINUTES)],
    },
    ExpectedDrill { name: "surge", held: &[20], alerts: &[] },
];

impl ExpectedDrill {
    /// Returns what is wrong with the alerts that fired.
    fn complaints(&self, fired: &Fired) -> Vec<String> {
        let name = self.name;
        let expected: BTreeMap<_, _> = self.alerts.iter().cloned().collect();
        let missing = expected.keys().filter(|alert| !fired.contains_key(**alert));
        let missing = missing.map(|alert| format!("{name}: {alert} does not fire"));
        let others = fired.iter().filter_map(|(alert, at)| match expected.get(alert.as_str()) {
            None => Some(format!("{name}: {alert} fires after {at} s and is not expected")),
            Some(within) if !within.contains(at) => {
                Some(format!("{name}: {alert} fires after {at} s, not in {within:?}"))
            }
            Some(_) => None,
        });
        missing.chain(others).collect()
    }

    /// Returns the rows of the table.
    fn rows(&self, fired: &Fired) -> String {
        let row =
            |alert: &str, within: &str, at: &str| format!("| {} | {alert} | {within} | {at} |\n", self.name);
        if self.alerts.is_empty() {
            return row("none", "", "");
        }
        let rows = self.alerts.iter().map(|(alert, within)| {
            let link = format!("[{alert}](runbook.md#{})", alert.to_lowercase());
            let at = fired.get(*alert).map_or("–".to_owned(), |at| second(*at));
            let within = if *within == BEFORE {
                "before".to_owned()
            } else {
                format!("{} to {}", within.start, within.end - 1)
            };
            row(&link, &within, &at)
        });
        rows.collect()
    }
}

fn second(at: i64) -> String {
    if at < 0 { "before".to_owned() } else { at.to_string() }
}

fn recording_of(drill: &str) -> Recording {
    Recording::read(&recording::file(drill))
}

#[test]
fn each_shipped_drill_raises_exactly_its_alerts_in_time() {
    if !has_promtool() {
        return;
    }
    // One thread each: most of the time is that of a process.
    let replays = DRILLS
        .each_ref()
        .map(|drill| std::thread::spawn(|| Replay::of_drill(&recording_of(drill.name), drill.held).alerts()));
    let fired = replays.map(|replay| replay.join().unwrap());
    let mut table = "| drill | alert expected | within s | fired after s |\n|---|---|---:|---:|\n".to_owned();
    table.extend(DRILLS.iter().zip(&fired).map(|(drill, fired)| drill.rows(fired)));
    println!("{table}");
    let complaints = DRILLS.iter().zip(&fired).flat_map(|(drill, fired)| drill.complaints(fired));
    let complaints: Vec<_> = complaints.collect();
    assert!(complaints.is_empty(), "{complaints:#?}");

    let page = read(&root().join(PAGE));
    let (before, rest) = page.split_once(MARKS[0]).unwrap();
    let (written, after) = rest.split_once(MARKS[1]).unwrap();
    let table = format!("\n{table}\n");
    if std::env::var_os("MERIDIAN_WRITE_DOCS").is_some() {
        std::fs::write(root().join(PAGE), [before, MARKS[0], &table, MARKS[1], after].concat()).unwrap();
    } else {
        assert_eq!(written, table, "{PAGE} is out of date: run this test with MERIDIAN_WRITE_DOCS=1");
    }
}

#[test]
fn no_alert_fires_in_a_calm_hour() {
    if !has_promtool() {
        return;
    }
    assert_eq!(Replay::of_calm_hour(&recording_of("calm")).alerts(), Fired::new());
}

/// A metric that was not recorded cannot raise an alert.
#[test]
fn each_drill_was_recorded_with_the_metrics_that_the_rules_read_now() {
    let drills = std::fs::read_dir(root().join("configs/drills")).unwrap();
    let name = |path: std::path::PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
    let drills: BTreeSet<_> = drills.map(|entry| name(entry.unwrap().path())).collect();
    let listed = DRILLS.iter().map(|drill| drill.name.to_owned()).collect();
    assert_eq!(drills, listed, "left: configs/drills");
    for name in DRILLS.iter().map(|drill| drill.name).chain(["calm"]) {
        let recording = recording_of(name);
        let again = "record it again: docs/drills.md has the command";
        assert_eq!(recording.metrics, metrics_of_rules(), "{name}: {again}");
        let bytes = std::fs::metadata(recording::file(name)).unwrap().len();
        assert!(bytes <= BYTES_MAX, "{name} has {bytes} bytes, more than {BYTES_MAX}");
        for job in ["gateway", "hub", "spoke"] {
            let up = format!("up{{job=\"meridian-{job}\"");
            assert!(recording.series.keys().any(|series| series.starts_with(&up)), "{name}: {up}");
        }
    }
}

#[test]
fn an_alert_that_is_missing_late_or_too_many_is_reported() {
    let drill = ExpectedDrill { name: "a", held: &[], alerts: &[("Late", 0..60), ("Missing", 0..60)] };
    let complaints = |alerts: &[(&str, i64)]| {
        drill.complaints(&alerts.iter().map(|(alert, at)| ((*alert).to_owned(), *at)).collect())
    };
    assert_eq!(complaints(&[("Late", 59), ("Missing", 0)]), [""; 0]);
    let expected = [
        "a: Missing does not fire",
        "a: Late fires after 60 s, not in 0..60",
        "a: Other fires after 1 s and is not expected",
    ];
    assert_eq!(complaints(&[("Late", 60), ("Other", 1)]), expected);
}
