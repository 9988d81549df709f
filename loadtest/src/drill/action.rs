//! What a step can do, as a person writes it.
//!
//! | words | mean |
//! |---|---|
//! | `kill`, `stop`, `start`, `restart`, `pause`, `resume` | SIGKILL; an orderly end; start it (again); an orderly end and a start; SIGSTOP; SIGCONT |
//! | … `region R`, `spoke R`, `replica R`, `gateway`, `hub`, `hub 2`, `store`, `store 1` | whom: a region is its spoke and its replicas, the store all its members |
//! | `cut link R`, `cut link to R`, `cut link from R` | nothing is delivered, or nothing one way |
//! | `slow link R 10x`, `delay link R 200ms` | so many times the distance; so much more of it |
//! | `lose 5% on link R` | of what crosses, as TCP shows it: late, and all behind it as well |
//! | `heal link R` | all of these end |
//! | `slow replica R 10x` | the replicas of R take so many times as long; `1x` is as before |
//! | `surge 3x for 10s`, `surge 3x on NAME for 10s` | all callers, or those, ask so many times as often |
//! | `drain region R`, `undrain region R` | as an operator does with `meridian drain` |

use std::time::Duration;

use regions::{RegionId, did_you_mean, duration};

use super::{Store, World};

/// What a step does.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Something to processes.
    Process(Verb, Whom),
    /// Something to the link between the gateway and a region.
    Link(RegionId, LinkChange),
    /// The replicas of a region take so many times as long.
    SlowReplicas(RegionId, u32),
    /// More is asked for.
    Surge {
        /// How many times as much.
        times: f64,
        /// For how long.
        lasts: Duration,
        /// By whom; by all if none is named.
        load: Option<String>,
    },
    /// An operator wants a region emptied.
    Drain(RegionId),
    /// And used again.
    Undrain(RegionId),
}

/// What is done to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// SIGKILL.
    Kill,
    /// An orderly end.
    Stop,
    /// Started, if it does not run.
    Start,
    /// An orderly end, and a start.
    Restart,
    /// SIGSTOP.
    Pause,
    /// SIGCONT.
    Resume,
}

/// To which processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whom {
    /// The spoke and the replicas of a region.
    Region(RegionId),
    /// Its spoke.
    Spoke(RegionId),
    /// Its replicas.
    Replicas(RegionId),
    /// The gateway.
    Gateway,
    /// One hub, counted from 1.
    Hub(u32),
    /// All members of the etcd, or one, counted from 1.
    Store(Option<u32>),
}

/// What becomes of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LinkChange {
    /// It delivers nothing this way.
    Cut(Way),
    /// It is as it was made.
    Heal,
    /// So many times as far.
    Times(u32),
    /// So much farther, each way half.
    Delay(Duration),
    /// Of a hundred pieces so many are lost at first.
    Lose(f64),
}

/// A direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To the region and from it.
    Both,
    /// To the region.
    To,
    /// From it.
    From,
}

/// Members of a world's etcd.
pub const MEMBERS: u32 = 3;
/// The most that anything is slowed or raised.
pub const TIMES_MAX: u32 = 1000;
/// What is told where nothing fits.
const FORMS: &str = "`kill|stop|start|restart|pause|resume region R|spoke R|replica R|gateway|hub N|store`, \
    `cut link R`, `cut link to R`, `cut link from R`, `heal link R`, `slow link R 10x`, `delay link R 200ms`, `lose 5% on link R`, \
    `slow replica R 10x`, `surge 3x for 10s`, `surge 3x on NAME for 10s`, `drain region R` or `undrain region R`";

impl Verb {
    const ALL: [(&str, Verb); 6] = [
        ("kill", Verb::Kill),
        ("stop", Verb::Stop),
        ("start", Verb::Start),
        ("restart", Verb::Restart),
        ("pause", Verb::Pause),
        ("resume", Verb::Resume),
    ];
}

impl Action {
    /// Reads an action and finds out whether `world` can do it.
    ///
    /// # Errors
    ///
    /// What to write instead.
    pub fn read(text: &str, world: &World, loads: &[&str]) -> Result<Action, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let verb = Verb::ALL.iter().find(|(name, _)| words.first() == Some(name)).map(|(_, verb)| *verb);
        match (verb, words.as_slice()) {
            (Some(verb), [_, whom @ ..]) => Ok(Action::Process(verb, Whom::read(whom, text, world)?)),
            (None, ["cut", "link", region]) => link(region, LinkChange::Cut(Way::Both), world),
            (None, ["cut", "link", "to", region]) => link(region, LinkChange::Cut(Way::To), world),
            (None, ["cut", "link", "from", region]) => link(region, LinkChange::Cut(Way::From), world),
            (None, ["heal", "link", region]) => link(region, LinkChange::Heal, world),
            (None, ["slow", "link", region, many]) => link(region, LinkChange::Times(times(many)?), world),
            (None, ["delay", "link", region, by]) => link(region, LinkChange::Delay(time(by)?), world),
            (None, ["lose", share, "on", "link", region]) => {
                link(region, LinkChange::Lose(percent(share)?), world)
            }
            (None, ["slow", "replica", region, many]) => {
                Ok(Action::SlowReplicas(known(region, world)?, times(many)?))
            }
            (None, ["surge", many, "for", lasts]) => {
                Ok(Action::Surge { times: factor(many)?, lasts: time(lasts)?, load: None })
            }
            (None, ["surge", many, "on", name, "for", lasts]) => {
                let load = Some(named(name, loads)?);
                Ok(Action::Surge { times: factor(many)?, lasts: time(lasts)?, load })
            }
            (None, ["drain", "region", region]) => Ok(Action::Drain(known(region, world)?)),
            (None, ["undrain", "region", region]) => Ok(Action::Undrain(known(region, world)?)),
            _ => Err(unknown(text)),
        }
    }

    /// The region that it is about, if it is about one.
    pub fn region(&self) -> Option<&RegionId> {
        match self {
            Action::Process(_, Whom::Region(region) | Whom::Spoke(region) | Whom::Replicas(region))
            | Action::Link(region, _)
            | Action::SlowReplicas(region, _)
            | Action::Drain(region)
            | Action::Undrain(region) => Some(region),
            Action::Process(_, Whom::Gateway | Whom::Hub(_) | Whom::Store(_)) | Action::Surge { .. } => None,
        }
    }

    /// Whether it can be done to a deployment that was there before: nobody lends a drill their processes and cables.
    pub fn suits_any_deployment(&self) -> bool {
        match self {
            Action::Surge { .. } | Action::Drain(_) | Action::Undrain(_) => true,
            Action::Process(..) | Action::Link(..) | Action::SlowReplicas(..) => false,
        }
    }
}

impl Whom {
    fn read(words: &[&str], text: &str, world: &World) -> Result<Whom, String> {
        match words {
            ["region", region] => Ok(Whom::Region(known(region, world)?)),
            ["spoke", region] => Ok(Whom::Spoke(known(region, world)?)),
            ["replica", region] => Ok(Whom::Replicas(known(region, world)?)),
            ["gateway"] => Ok(Whom::Gateway),
            ["hub"] if world.hubs == 1 => Ok(Whom::Hub(1)),
            ["hub"] => Err(format!("`{text}`: which of {} hubs? write hub 1 to hub {0}", world.hubs)),
            ["hub", number] => counted(number, world.hubs, "hub").map(Whom::Hub),
            ["store", ..] if world.store == Store::Embedded => Err(format!(
                "`{text}`: the store of this world is a file in its hub; write store = \"etcd\" under [world]"
            )),
            ["store"] => Ok(Whom::Store(None)),
            ["store", number] => counted(number, MEMBERS, "store").map(|number| Whom::Store(Some(number))),
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
    format!("`{text}` is nothing that a drill can do{hint}; write {FORMS}")
}

/// A region of this world.
pub(super) fn known(text: &str, world: &World) -> Result<RegionId, String> {
    world.regions.iter().find(|region| region.as_str() == text).cloned().ok_or_else(|| {
        let there: Vec<_> = world.regions.iter().map(RegionId::as_str).collect();
        let hint = did_you_mean(text, there.iter().copied());
        format!("no region `{text}` in this world{hint}; there are {}", there.join(", "))
    })
}

/// One of the loads.
pub(super) fn named(text: &str, loads: &[&str]) -> Result<String, String> {
    if loads.contains(&text) {
        return Ok(text.to_owned());
    }
    let hint = did_you_mean(text, loads.iter().copied());
    Err(format!("no load `{text}`{hint}; there are {}", loads.join(", ")))
}

fn link(region: &str, change: LinkChange, world: &World) -> Result<Action, String> {
    Ok(Action::Link(known(region, world)?, change))
}

fn counted(text: &str, count: u32, what: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| (1..=count).contains(number));
    number.ok_or_else(|| format!("no {what} `{text}` in this world; there are {what} 1 to {what} {count}"))
}

fn times(text: &str) -> Result<u32, String> {
    let number = text.strip_suffix('x').and_then(|number| number.parse().ok());
    number
        .filter(|times| (1..=TIMES_MAX).contains(times))
        .ok_or_else(|| format!("`{text}`: write how many times, from 1x to {TIMES_MAX}x, such as 10x"))
}

/// Of a rate, which can also be raised by half.
fn factor(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('x').and_then(|number| number.parse().ok());
    number
        .filter(|times: &f64| (0.0..=f64::from(TIMES_MAX)).contains(times))
        .ok_or_else(|| format!("`{text}`: write how many times, from 0x to {TIMES_MAX}x, such as 3x or 1.5x"))
}

fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').and_then(|number| number.parse().ok());
    number.filter(|share: &f64| *share > 0.0 && *share <= 90.0).ok_or_else(|| {
        format!("`{text}`: write a share above 0% and up to 90%, such as 5%; `cut link` loses all")
    })
}

/// A length of time above zero.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    duration::parse(text)
        .filter(|time| !time.is_zero())
        .ok_or_else(|| format!("`{text}`: write a time above zero, as 500ms, 5s or 2m"))
}

#[cfg(test)]
mod tests {
    use super::super::Engine;
    use super::*;

    pub(crate) fn world(hubs: u32, store: Store) -> World {
        let regions = ["aws/us-east-1", "gcp/europe-west4"];
        World {
            regions: regions.map(|region| region.parse().unwrap()).to_vec(),
            store,
            hubs,
            deployments: None,
            engine: Engine::Cpu,
            capacity: None,
        }
    }

    #[test]
    fn what_a_person_writes_is_done_or_refused_with_what_there_is() {
        let (alone, on_etcd) = (world(1, Store::Embedded), world(2, Store::Etcd));
        let europe = || "gcp/europe-west4".parse::<RegionId>().unwrap();
        let check = |text: &str, world: &World, expected: Result<Action, &str>| match (
            Action::read(text, world, &["near", "far"]),
            expected,
        ) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{text}"),
            (Err(problem), Err(part)) => assert!(problem.contains(part), "{part} in {problem}"),
            (found, expected) => panic!("{text}: {found:?} is not {expected:?}"),
        };
        let link = |change| Ok(Action::Link(europe(), change));
        let region = Whom::Region(europe());
        check("kill region gcp/europe-west4", &alone, Ok(Action::Process(Verb::Kill, region)));
        check("pause hub", &alone, Ok(Action::Process(Verb::Pause, Whom::Hub(1))));
        check("pause hub 2", &on_etcd, Ok(Action::Process(Verb::Pause, Whom::Hub(2))));
        check("stop store", &on_etcd, Ok(Action::Process(Verb::Stop, Whom::Store(None))));
        check("kill store 3", &on_etcd, Ok(Action::Process(Verb::Kill, Whom::Store(Some(3)))));
        check("cut link gcp/europe-west4", &alone, link(LinkChange::Cut(Way::Both)));
        check("cut link from gcp/europe-west4", &alone, link(LinkChange::Cut(Way::From)));
        check("slow link gcp/europe-west4 10x", &alone, link(LinkChange::Times(10)));
        check("lose 5% on link gcp/europe-west4", &alone, link(LinkChange::Lose(5.0)));
        check("slow replica gcp/europe-west4 10x", &alone, Ok(Action::SlowReplicas(europe(), 10)));
        let lasts = Duration::from_secs(10);
        check("surge 1.5x for 10s", &alone, Ok(Action::Surge { times: 1.5, lasts, load: None }));
        let load = Some("far".to_owned());
        check("surge 3x on far for 10s", &alone, Ok(Action::Surge { times: 3.0, lasts, load }));
        check("undrain region gcp/europe-west4", &alone, Ok(Action::Undrain(europe())));

        check("kil region gcp/europe-west4", &alone, Err("did you mean kill"));
        check("kill everything", &alone, Err("write `kill|stop"));
        check("", &alone, Err("nothing that a drill can do"));
        check(
            "kill region gcp/europe-west5",
            &alone,
            Err("did you mean gcp/europe-west4?; there are aws/us-east-1"),
        );
        check("stop store", &alone, Err("store = \"etcd\""));
        check("stop store 4", &on_etcd, Err("store 1 to store 3"));
        check("pause hub", &on_etcd, Err("hub 1 to hub 2"));
        check("pause hub 2", &alone, Err("no hub `2`"));
        check("slow link gcp/europe-west4 1001x", &alone, Err("from 1x to 1000x"));
        check("slow link gcp/europe-west4 0x", &alone, Err("from 1x"));
        check("lose 100% on link gcp/europe-west4", &alone, Err("`cut link` loses all"));
        check("surge 3x on fra for 10s", &alone, Err("did you mean far?; there are near, far"));
        check("surge 3x for ever", &alone, Err("write a time"));
    }
}
