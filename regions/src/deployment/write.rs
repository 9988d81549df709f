//! Serializer of deployments as a deployments file, which an operator can edit and apply.

use std::fmt::Write;

use super::timetable::TimetableEntry;
use super::{Deployment, Scaling};
use crate::written::{self, Unwritable, list, quoted};
use configuration::duration;

/// Returns a file that [`super::parse_deployments`] reads as these deployments.
///
/// # Errors
///
/// If a residency policy has several conditions: omitting one would widen the policy.
pub fn write_deployments<'a>(
    deployments: impl IntoIterator<Item = &'a Deployment>,
) -> Result<String, Unwritable> {
    let mut text = String::new();
    for deployment in deployments {
        write_deployment(&mut text, deployment)?;
    }
    // An empty file is treated as a mistake; this one states that there are no deployments.
    Ok(if text.is_empty() { "deployment = []\n".to_owned() } else { text })
}

fn write_deployment(text: &mut String, deployment: &Deployment) -> Result<(), Unwritable> {
    let Deployment { name, task, model, engine, residency, regions, order, placement, scaling } = deployment;
    let mut line = |line: String| writeln!(text, "{line}").expect("writing to a String cannot fail");
    line(format!("[[deployment]]\nname = {}\ntask = {}", quoted(name), quoted(task)));
    line(format!("model = {}", quoted(model)));
    line(format!("engine = {{ kind = {}, precision = {} }}", quoted(engine.kind), quoted(engine.precision)));
    if let Some(residency) = written::residency("deployment", name, residency)? {
        line(format!("residency = {residency}"));
    }
    match placement {
        // The regions are those that the hub has chosen for it.
        Some(placement) => line(format!("placement = {}", inline_table(&placement.key_values()))),
        None if !regions.is_empty() => line(format!("regions = {}", list(regions))),
        None => {}
    }
    if !order.is_empty() {
        line(format!("routing = {{ order = {} }}", list(order)));
    }
    if *scaling != Scaling::default() {
        line(format!("scaling = {}", inline_table(&scaling.key_values())));
    }
    line(String::new());
    Ok(())
}

/// Formats the keys that are set as an inline table.
fn inline_table(keys: &[(&str, Option<String>)]) -> String {
    let set = keys.iter().filter_map(|(key, value)| Some(format!("{key} = {}", value.as_ref()?)));
    format!("{{ {} }}", set.collect::<Vec<_>>().join(", "))
}

impl Scaling {
    /// Returns each key with its value as written in a file; `None` for a key that is omitted.
    pub fn key_values(&self) -> [(&'static str, Option<String>); 8] {
        let Scaling {
            min,
            max,
            concurrency_target,
            target_utilization,
            autoscaling_window,
            scale_down_delay,
            zero_after,
            timetable,
        } = self;
        let time = |time| quoted(duration::write(time));
        [
            ("min", Some(min.to_string())),
            ("max", Some(max.to_string())),
            ("concurrency_target", concurrency_target.map(|target| target.to_string())),
            ("target_utilization", Some(target_utilization.to_string())),
            ("autoscaling_window", Some(time(*autoscaling_window))),
            ("scale_down_delay", Some(time(*scale_down_delay))),
            ("zero_after", Some(zero_after.map_or_else(|| quoted("never"), time))),
            ("timetable", (!timetable.is_empty()).then(|| quoted_timetable(timetable))),
        ]
    }
}

fn quoted_timetable(timetable: &[TimetableEntry]) -> String {
    let entry = |TimetableEntry { days, from, to, min }: &TimetableEntry| {
        let [days, from, to] = [quoted(days), quoted(from), quoted(to)];
        format!("{{ days = {days}, from = {from}, to = {to}, min = {min} }}")
    };
    format!("[{}]", timetable.iter().map(entry).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::Catalogue;
    use crate::deployment::parse_deployments;

    #[test]
    fn deployments_round_trip_through_a_file() {
        let catalogue = Catalogue::builtin();
        let text = include_str!("../../../configs/deployments.toml").to_owned()
            + "[[deployment]]\nname = \"all\"\ntask = \"rerank\"\nmodel = \"a \\\"quoted\\\" \\\\ folder\"\n\
               engine = { kind = \"cpu\", precision = \"int8\" }\nresidency = { allow = [\"de\", \"aws/us-east-1\"] }\n\
               regions = [\"gcp/europe-west3\", \"aws/us-east-1\"]\nrouting = { order = [\"aws/us-east-1\"] }\n\
               scaling = { min = 0, max = 9, concurrency_target = 3, scale_down_delay = \"20m\", zero_after = \"never\",\n\
               timetable = [{ days = \"fri-mon\", from = \"22:00\", to = \"06:30\", min = 2 }] }\n\
               [[deployment]]\nname = \"placed\"\ntask = \"embed\"\nmodel = \"hf://a/b\"\n\
               engine = { kind = \"tensorrt-llm\", precision = \"fp8\" }\n\
               [deployment.placement]\naccelerator = [\"l4\", \"t4\"]\nmin_regions = 2\nmin_replicas = 3\nmax_cost = 12.5\n\
               [[deployment]]\nname = \"cheap\"\ntask = \"embed\"\nmodel = \"hf://a/b\"\n\
               engine = { kind = \"cpu\", precision = \"f32\" }\nplacement = { min_regions = 1, max_cost = 3 }\n";
        let read = parse_deployments(&text, &catalogue).unwrap();
        assert!(read.len() > 2);
        let written = write_deployments(&read).unwrap();
        assert_eq!(parse_deployments(&written, &catalogue), Ok(read.clone()), "{written}");
        assert_eq!(parse_deployments(&write_deployments([]).unwrap(), &catalogue), Ok(Vec::new()));

        let two_conditions = Deployment { residency: "eu & de".parse().unwrap(), ..read[0].clone() };
        assert!(write_deployments([&two_conditions]).unwrap_err().to_string().contains("`de & eu`"));
    }
}
