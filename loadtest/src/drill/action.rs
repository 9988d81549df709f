//! Actions of a drill step, in the syntax of the drill file.
//!
//! | syntax | effect |
//! |---|---|
//! | `kill`, `stop`, `start`, `restart`, `pause`, `resume` | SIGKILL; graceful shutdown; start; graceful shutdown and start; SIGSTOP; SIGCONT |
//! | … `region R`, `spoke R`, `spoke R 2`, `replica R`, `gateway`, `gateway R`, `hub`, `hub 2`, `store`, `store 1` | target processes: a region is its spokes and its replicas, `spoke R` all its spokes, `gateway` all gateways, `gateway R` that near R, the store all its members |
//! | `cut link R`, `cut link to R`, `cut link from R` | drops all traffic, or all traffic in one direction |
//! | `slow link R 10x`, `delay link R 200ms` | multiplies the round-trip time; adds to it |
//! | `lose 5% on link R` | packet loss as TCP shows it: the segment and everything behind it is late |
//! | `heal link R` | removes all link faults |
//! | `slow replica R 10x` | slows the replicas of R by this factor; `1x` restores their speed |
//! | `surge 3x for 10s`, `surge 3x on NAME for 10s` | multiplies the request rate of all loads, or of one |
//! | `drain region R`, `undrain region R` | the same as `meridian drain` and its reversal |

use std::time::Duration;

use regions::{RegionId, did_you_mean, duration};

use super::{DrillFleet, DrillStore};

/// Action of a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Sends a signal or a lifecycle command to processes.
    Process(ProcessAction, ProcessTarget),
    /// Changes the links between the gateways and a region.
    Link(RegionId, LinkChange),
    /// Slows the replicas of a region by a factor.
    SlowReplicas(RegionId, u32),
    /// Multiplies the request rate.
    Surge {
        /// Factor of the rate.
        times: f64,
        /// Duration of the surge.
        duration: Duration,
        /// Name of the load; `None` for all loads.
        load: Option<String>,
    },
    /// Drains a region.
    Drain(RegionId),
    /// Ends the drain of a region.
    Undrain(RegionId),
}

/// Lifecycle command or signal for a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessAction {
    /// SIGKILL.
    Kill,
    /// Graceful shutdown.
    Stop,
    /// Starts the process if it is not running.
    Start,
    /// Graceful shutdown, then start.
    Restart,
    /// SIGSTOP.
    Pause,
    /// SIGCONT.
    Resume,
}

/// Processes that an action applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProcessTarget {
    /// The spokes and the replicas of a region.
    Region(RegionId),
    /// All spokes of a region, or the one with this number, from 1.
    Spoke(RegionId, Option<u32>),
    /// The replicas of a region.
    Replicas(RegionId),
    /// All gateways, or the one near a region.
    Gateways(Option<RegionId>),
    /// One hub, counted from 1.
    Hub(u32),
    /// All members of the etcd cluster, or one, counted from 1.
    Store(Option<u32>),
}

/// Change of a link's behaviour.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LinkChange {
    /// Drops all traffic in this direction.
    Cut(LinkDirection),
    /// Removes all link faults.
    Heal,
    /// Multiplies the round-trip time.
    Times(u32),
    /// Adds to the round-trip time, half in each direction.
    Delay(Duration),
    /// Percentage of segments that are lost once and retransmitted.
    Lose(f64),
}

/// Direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkDirection {
    /// To the region and from the region.
    Both,
    /// To the region.
    To,
    /// From the region.
    From,
}

/// Members of the etcd cluster of a fleet.
pub const STORE_MEMBERS: u32 = 3;
/// Largest factor of a slowdown or surge.
pub const TIMES_MAX: u32 = 1000;
/// Syntax summary for error messages.
const SYNTAX: &str = "`kill|stop|start|restart|pause|resume region R|spoke R [N]|replica R|gateway [R]|hub N|store`, \
    `cut link R`, `cut link to R`, `cut link from R`, `heal link R`, `slow link R 10x`, `delay link R 200ms`, `lose 5% on link R`, \
    `slow replica R 10x`, `surge 3x for 10s`, `surge 3x on NAME for 10s`, `drain region R` or `undrain region R`";

impl ProcessAction {
    const ALL: [(&str, ProcessAction); 6] = [
        ("kill", ProcessAction::Kill),
        ("stop", ProcessAction::Stop),
        ("start", ProcessAction::Start),
        ("restart", ProcessAction::Restart),
        ("pause", ProcessAction::Pause),
        ("resume", ProcessAction::Resume),
    ];
}

impl Action {
    /// Parses an action and checks that `fleet` supports it.
    ///
    /// # Errors
    ///
    /// A message with the accepted syntax.
    pub fn read(text: &str, fleet: &DrillFleet, loads: &[&str]) -> Result<Action, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let action = ProcessAction::ALL
            .iter()
            .find(|(name, _)| words.first() == Some(name))
            .map(|(_, action)| *action);
        match (action, words.as_slice()) {
            (Some(action), [_, target @ ..]) => {
                Ok(Action::Process(action, ProcessTarget::read(target, text, fleet)?))
            }
            (None, ["cut", "link", region]) => link(region, LinkChange::Cut(LinkDirection::Both), fleet),
            (None, ["cut", "link", "to", region]) => link(region, LinkChange::Cut(LinkDirection::To), fleet),
            (None, ["cut", "link", "from", region]) => {
                link(region, LinkChange::Cut(LinkDirection::From), fleet)
            }
            (None, ["heal", "link", region]) => link(region, LinkChange::Heal, fleet),
            (None, ["slow", "link", region, many]) => link(region, LinkChange::Times(times(many)?), fleet),
            (None, ["delay", "link", region, by]) => link(region, LinkChange::Delay(time(by)?), fleet),
            (None, ["lose", share, "on", "link", region]) => {
                link(region, LinkChange::Lose(percent(share)?), fleet)
            }
            (None, ["slow", "replica", region, many]) => {
                Ok(Action::SlowReplicas(parse_region(region, fleet)?, times(many)?))
            }
            (None, ["surge", many, "for", duration]) => {
                Ok(Action::Surge { times: factor(many)?, duration: time(duration)?, load: None })
            }
            (None, ["surge", many, "on", name, "for", duration]) => {
                let load = Some(parse_load(name, loads)?);
                Ok(Action::Surge { times: factor(many)?, duration: time(duration)?, load })
            }
            (None, ["drain", "region", region]) => Ok(Action::Drain(parse_region(region, fleet)?)),
            (None, ["undrain", "region", region]) => Ok(Action::Undrain(parse_region(region, fleet)?)),
            _ => Err(unknown(text)),
        }
    }

    /// Returns the region that the action applies to, if any.
    pub fn region(&self) -> Option<&RegionId> {
        match self {
            Action::Process(
                _,
                ProcessTarget::Region(region)
                | ProcessTarget::Spoke(region, _)
                | ProcessTarget::Replicas(region),
            )
            | Action::Link(region, _)
            | Action::SlowReplicas(region, _)
            | Action::Drain(region)
            | Action::Undrain(region) => Some(region),
            Action::Process(
                _,
                ProcessTarget::Gateways(_) | ProcessTarget::Hub(_) | ProcessTarget::Store(_),
            )
            | Action::Surge { .. } => None,
        }
    }

    /// Returns whether the action is possible against an existing deployment, whose processes and links the drill does
    /// not control.
    pub fn is_possible_on_existing_deployment(&self) -> bool {
        match self {
            Action::Surge { .. } | Action::Drain(_) | Action::Undrain(_) => true,
            Action::Process(..) | Action::Link(..) | Action::SlowReplicas(..) => false,
        }
    }
}

impl ProcessTarget {
    fn read(words: &[&str], text: &str, fleet: &DrillFleet) -> Result<ProcessTarget, String> {
        match words {
            ["region", region] => Ok(ProcessTarget::Region(parse_region(region, fleet)?)),
            ["spoke", region] => Ok(ProcessTarget::Spoke(parse_region(region, fleet)?, None)),
            ["spoke", region, number] => {
                let number = parse_number(number, fleet.spokes, "spoke")?;
                Ok(ProcessTarget::Spoke(parse_region(region, fleet)?, Some(number)))
            }
            ["replica", region] => Ok(ProcessTarget::Replicas(parse_region(region, fleet)?)),
            ["gateway"] => Ok(ProcessTarget::Gateways(None)),
            ["gateway", region] => {
                parse_region(region, fleet).map(|region| ProcessTarget::Gateways(Some(region)))
            }
            ["hub"] if fleet.hubs == 1 => Ok(ProcessTarget::Hub(1)),
            ["hub"] => Err(format!("`{text}`: the fleet has {} hubs; write hub 1 to hub {0}", fleet.hubs)),
            ["hub", number] => parse_number(number, fleet.hubs, "hub").map(ProcessTarget::Hub),
            ["store", ..] if fleet.store == DrillStore::Embedded => {
                Err(format!("`{text}`: the store is embedded in the hub; set store = \"etcd\" under [fleet]"))
            }
            ["store"] => Ok(ProcessTarget::Store(None)),
            ["store", number] => {
                parse_number(number, STORE_MEMBERS, "store").map(|number| ProcessTarget::Store(Some(number)))
            }
            _ => Err(unknown(text)),
        }
    }
}

fn unknown(text: &str) -> String {
    let verbs =
        ["kill", "stop", "start", "restart", "pause", "resume", "cut", "heal", "slow", "delay", "lose"];
    let verbs = verbs.into_iter().chain(["surge", "drain", "undrain"]);
    let given = text.split_whitespace().next().unwrap_or_default();
    let hint = did_you_mean(given, verbs.filter(|verb| *verb != given));
    format!("unknown action `{text}`{hint}; write {SYNTAX}")
}

/// Parses the name of a region of the fleet.
pub(super) fn parse_region(text: &str, fleet: &DrillFleet) -> Result<RegionId, String> {
    fleet.regions.iter().find(|region| region.as_str() == text).cloned().ok_or_else(|| {
        let there: Vec<_> = fleet.regions.iter().map(RegionId::as_str).collect();
        let hint = did_you_mean(text, there.iter().copied());
        format!("no region `{text}` in the fleet{hint}; its regions are {}", there.join(", "))
    })
}

/// Parses the name of one of the loads.
pub(super) fn parse_load(text: &str, loads: &[&str]) -> Result<String, String> {
    if loads.contains(&text) {
        return Ok(text.to_owned());
    }
    let hint = did_you_mean(text, loads.iter().copied());
    Err(format!("no load `{text}`{hint}; the loads are {}", loads.join(", ")))
}

fn link(region: &str, change: LinkChange, fleet: &DrillFleet) -> Result<Action, String> {
    Ok(Action::Link(parse_region(region, fleet)?, change))
}

fn parse_number(text: &str, count: u32, what: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| (1..=count).contains(number));
    number.ok_or_else(|| format!("no {what} `{text}` in the fleet; it has {what} 1 to {what} {count}"))
}

fn times(text: &str) -> Result<u32, String> {
    let number = text.strip_suffix('x').and_then(|number| number.parse().ok());
    number
        .filter(|times| (1..=TIMES_MAX).contains(times))
        .ok_or_else(|| format!("`{text}`: write a factor from 1x to {TIMES_MAX}x, such as 10x"))
}

/// Parses a rate factor, which may be fractional.
fn factor(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('x').and_then(|number| number.parse().ok());
    number
        .filter(|times: &f64| (0.0..=f64::from(TIMES_MAX)).contains(times))
        .ok_or_else(|| format!("`{text}`: write a factor from 0x to {TIMES_MAX}x, such as 3x or 1.5x"))
}

fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').and_then(|number| number.parse().ok());
    number.filter(|share: &f64| *share > 0.0 && *share <= 90.0).ok_or_else(|| {
        format!("`{text}`: write a share above 0% and at most 90%, such as 5%; `cut link` drops all traffic")
    })
}

/// Parses a duration above zero.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    duration::parse(text)
        .filter(|time| !time.is_zero())
        .ok_or_else(|| format!("`{text}`: write a time above zero, such as 500ms, 5s or 2m"))
}

#[cfg(test)]
mod tests {
    use super::super::DrillEngine;
    use super::*;

    pub(crate) fn fleet(hubs: u32, store: DrillStore) -> DrillFleet {
        let regions = ["aws/us-east-1", "gcp/europe-west4"];
        DrillFleet {
            regions: regions.map(|region| region.parse().unwrap()).to_vec(),
            store,
            hubs,
            spokes: 1,
            deployments: None,
            engine: DrillEngine::Cpu,
            capacity: None,
        }
    }

    #[test]
    fn actions_are_parsed_or_rejected_with_the_valid_values() {
        let (alone, on_etcd) = (fleet(1, DrillStore::Embedded), fleet(2, DrillStore::Etcd));
        let europe = || "gcp/europe-west4".parse::<RegionId>().unwrap();
        let check = |text: &str, fleet: &DrillFleet, expected: Result<Action, &str>| match (
            Action::read(text, fleet, &["near", "far"]),
            expected,
        ) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{text}"),
            (Err(problem), Err(part)) => assert!(problem.contains(part), "{part} in {problem}"),
            (found, expected) => panic!("{text}: {found:?} is not {expected:?}"),
        };
        let link = |change| Ok(Action::Link(europe(), change));
        let region = ProcessTarget::Region(europe());
        check("kill region gcp/europe-west4", &alone, Ok(Action::Process(ProcessAction::Kill, region)));
        check("pause hub", &alone, Ok(Action::Process(ProcessAction::Pause, ProcessTarget::Hub(1))));
        check("pause hub 2", &on_etcd, Ok(Action::Process(ProcessAction::Pause, ProcessTarget::Hub(2))));
        check("stop store", &on_etcd, Ok(Action::Process(ProcessAction::Stop, ProcessTarget::Store(None))));
        check(
            "kill store 3",
            &on_etcd,
            Ok(Action::Process(ProcessAction::Kill, ProcessTarget::Store(Some(3)))),
        );
        check("cut link gcp/europe-west4", &alone, link(LinkChange::Cut(LinkDirection::Both)));
        check("cut link from gcp/europe-west4", &alone, link(LinkChange::Cut(LinkDirection::From)));
        check("slow link gcp/europe-west4 10x", &alone, link(LinkChange::Times(10)));
        check("lose 5% on link gcp/europe-west4", &alone, link(LinkChange::Lose(5.0)));
        check("slow replica gcp/europe-west4 10x", &alone, Ok(Action::SlowReplicas(europe(), 10)));
        let duration = Duration::from_secs(10);
        check("surge 1.5x for 10s", &alone, Ok(Action::Surge { times: 1.5, duration, load: None }));
        let load = Some("far".to_owned());
        check("surge 3x on far for 10s", &alone, Ok(Action::Surge { times: 3.0, duration, load }));
        check("undrain region gcp/europe-west4", &alone, Ok(Action::Undrain(europe())));

        check("kil region gcp/europe-west4", &alone, Err("did you mean kill"));
        check("kill everything", &alone, Err("write `kill|stop"));
        check("", &alone, Err("unknown action"));
        check(
            "kill region gcp/europe-west5",
            &alone,
            Err("did you mean gcp/europe-west4?; its regions are aws/us-east-1"),
        );
        check("stop store", &alone, Err("store = \"etcd\""));
        check("stop store 4", &on_etcd, Err("store 1 to store 3"));
        check("pause hub", &on_etcd, Err("hub 1 to hub 2"));
        check("pause hub 2", &alone, Err("no hub `2`"));
        check("slow link gcp/europe-west4 1001x", &alone, Err("from 1x to 1000x"));
        check("slow link gcp/europe-west4 0x", &alone, Err("from 1x"));
        check("lose 100% on link gcp/europe-west4", &alone, Err("`cut link` drops all"));
        check("surge 3x on fra for 10s", &alone, Err("did you mean far?; the loads are near, far"));
        check("surge 3x for ever", &alone, Err("write a time"));
    }
}
