"""What the demo asks about: made up for it, so that no model can know the answer without reading the text."""

TEXT = """\
The lighthouse at Cape Morrow stands on a granite cliff above the northern sea. Before it was built, the
strait below was known to sailors as the Drowned Mile, because more than sixty ships had been lost there in a
single century. The reefs lie just under the surface, the current runs hard to the east, and for half of the
year a thick fog covers everything until noon.

In 1884 the harbour council asked for plans, and eleven engineers sent drawings. The council chose the design
of Ada Lindqvist, a young engineer from the town of Vesterby, who had studied the old towers along the coast
for three summers. Her tower was round, so that the wind could not catch an edge, and hollow, with a spiral
staircase of two hundred and twelve steps. The walls are four metres thick at the foot and less than one metre
thick at the top. All the stone was cut in a quarry on the other side of the bay and brought across on flat
boats when the water was calm.

The work took three years. In the second winter a storm carried away the landing stage and two cranes, and the
workers had to live on the rock for nineteen days until a boat could reach them. Nobody was hurt. The lamp was
lit for the first time on the fourth of October 1887, and its light could be seen from thirty kilometres away.

For almost a hundred years a keeper and his family lived in the small white house beside the tower. They kept
goats, grew potatoes behind a stone wall, and wrote down the weather every morning and every evening in large
blue books. Those books are now in the museum at Vesterby, where scientists use them to learn how the climate
of the coast has changed. In 1979 the lamp became automatic, and the last keeper, Jonas Hale, moved to the
town with his dog. Today the tower is open to visitors from May to September, and on clear evenings people
climb the stairs to watch the ships go by."""

QUESTION = "Answer with one sentence: what is the name of the engineer whose design the council chose?"
EXPECTED = "Lindqvist"
